"""EAGLE-3 drafters: data, training, decoding and export. Imports `extract`, never the other way round."""
