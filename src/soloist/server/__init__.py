"""HTTP before the engine: requests in, streams out, nothing computed here.

Knows the engine, never the executors or the device.
"""
