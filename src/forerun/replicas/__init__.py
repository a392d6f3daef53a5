"""Replicas of the server behind Ray Serve, on one machine or many (``forerun serve --ray``)."""
