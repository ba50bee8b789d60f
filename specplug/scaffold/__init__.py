"""``specplug new``: an installable package around a proposer or a length policy of one's own."""
