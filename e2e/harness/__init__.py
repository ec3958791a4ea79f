"""What the scenarios and the demo stand on.

installation    cluster, images and chart, each brought to the state of the working tree
namespace       a namespace: apply, wait, look, and report what failed
client          OpenAI clients that reach a model's Service from a pod of its namespace
models          InferenceModels as the scenarios use them
hub             a Hub that pods can reach, and models that come from it
writes          who wrote what, by the API server's audit log
"""
