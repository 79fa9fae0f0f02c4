"""Evidence: what an alert was told by - pictures of both sides, the similarity tile with mask and path, the numbers."""
