"""Evidence behind an alert: pictures of both sides, the similarity tile with mask and path, the numbers."""
