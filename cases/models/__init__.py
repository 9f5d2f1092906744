"""The layer tables of the known base models (CSV) and the script that writes them."""
