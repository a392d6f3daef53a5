"""How much of which draft a step takes: chances, seconds, and what trying may cost."""
