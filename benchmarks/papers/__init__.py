"""The tables and figures of the Lookahead and TriForce papers, and their baselines, one file each."""
