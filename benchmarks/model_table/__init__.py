"""``docs/results/models.md``: what the tests' tiny models do, found by running them."""
