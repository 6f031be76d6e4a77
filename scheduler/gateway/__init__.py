"""The HTTP gateway: a queue producer that speaks the Tinker protocol. It holds no truth: requests are in the log, what tenants named is in
the catalog, and what it remembers of both can be lost at any time.

    wire        the protobuf messages, as a table
    translate   the protocol's requests and results from and to `state.requests`
    answers     futures in memory, recalled from the log where this process did not see them begin
    desk        one tenant: sessions, models, samplers, checkpoints
    app         HTTP: keys, routes, limits
"""
