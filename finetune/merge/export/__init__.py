"""A model folder in the form that other programs serve: one GGUF file, with an Ollama Modelfile beside it."""
