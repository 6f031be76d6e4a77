"""What an operator holds: the command line, the inspect tools, the demo, benchmarks, the runbook.

The only place that wires everything together: it may import every other package.
"""
