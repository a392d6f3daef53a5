"""What proposes by itself: an index of texts, a lookup in the prompt, a trained head."""
