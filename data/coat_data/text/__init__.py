"""Text: chat templates, tokens, labels, documents, and the proof that labels are right."""
