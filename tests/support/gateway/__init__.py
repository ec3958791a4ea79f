"""Gateways, and the frontends behind them, for tests."""
