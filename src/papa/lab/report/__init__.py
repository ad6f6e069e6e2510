"""From results to tables, figures and pages."""
