"""Decide how much of which draft a step scores, from probabilities, costs, and what trials may lose."""
