"""Benchmarks: each compares with something else measured in the same run, and writes its result with command, versions and machine."""
