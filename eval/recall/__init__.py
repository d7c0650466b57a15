"""Recall: phrases of a text that a trained model must repeat; MQAR, for which small models are trained."""
