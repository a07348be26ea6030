"""One figure a file: an info step that is tested by equality, then a drawing step."""
