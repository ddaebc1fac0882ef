"""apollo-nano: the drawn world it learns from, and how it was trained from nothing."""
