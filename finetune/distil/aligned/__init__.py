"""Teacher and student with different tokenizers: their answers aligned by the bytes of the text, and compared where they meet."""
