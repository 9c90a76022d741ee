"""Measurements. Each prints a table and writes a JSON file with command, git sha, device and raw rows."""
