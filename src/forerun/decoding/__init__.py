"""The decoding step (propose, score, verify, commit, learn), and the sources that propose drafts."""
