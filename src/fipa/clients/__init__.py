"""What a client does between receiving a model and answering: local training rules."""
