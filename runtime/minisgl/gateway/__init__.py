"""One URL for many models: routes requests to frontends, lists all models, holds requests of models without frontends,
and checks keys and quotas."""
