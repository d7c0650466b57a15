"""The ground floor: what several folders need and none of them owns. Imports nothing of LinGPT."""
