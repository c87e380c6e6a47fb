"""What the engine measures: counters, latencies, traces of requests, the occupancy plot."""
