"""What several folders of crosshead need; it imports none of them."""
