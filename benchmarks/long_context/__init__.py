"""Long contexts: what is measured on a prompt that was read once."""
