"""The proposers that come with specplug. They use the same contract and entry points as yours."""
