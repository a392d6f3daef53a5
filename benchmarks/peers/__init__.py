"""Other engines on equal weights, each in a process, so that thread pools do not disturb each other."""
