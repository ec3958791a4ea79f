"""The gateway as an endpoint picker for Gateways: external processing with the Endpoint Picker Protocol 1.0.0."""
