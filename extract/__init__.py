"""Prompts to hidden states: everything up to the store that training reads. Never imports `eagle3`."""
