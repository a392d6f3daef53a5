"""The server: requests of many clients queue, decode together, and end when their client goes."""
