"""One step for every level: propose, score, verify, commit, learn; and the sources that propose."""
