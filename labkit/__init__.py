"""labkit: a Jupyter-first laboratory for the memory of LLM serving."""
