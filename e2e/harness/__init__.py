"""What the scenarios and the demo stand on.

installation    cluster, images and chart, each brought to the state of the working tree
namespace       a namespace: apply, wait, look, and report what failed
client          OpenAI clients that reach a model's Service from a pod of its namespace
models          InferenceModels as the scenarios use them
"""
