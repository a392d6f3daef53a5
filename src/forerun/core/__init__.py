"""Types that every other part uses: requests, trees, blocks, sampling, verification."""
