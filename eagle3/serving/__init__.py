"""A server for others: started, held, measured and tuned."""
