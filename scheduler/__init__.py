"""The daemon: takes requests in, decides, dispatches, answers; and the queue producer.

`core` decides and is pure apart from folding its own events; `daemon`, `producer` and `embedded` are the shell around it.
"""
