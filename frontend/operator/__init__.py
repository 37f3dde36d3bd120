"""What operators see and do: numbers, health, the page of what happens now, and routes of their own."""
