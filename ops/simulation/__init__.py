"""Seeded simulation of a whole fleet: real daemons, producers and worker machines on a virtual clock, over a server, a disk, workers and
a network that fail. `world` is what fails, `tenants` what the fleet is asked for and must answer, `history` one run and its checks."""
