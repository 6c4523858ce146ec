"""What a teacher says of every target token, kept on disk: its top k, and the normaliser of all its logits by temperature."""
