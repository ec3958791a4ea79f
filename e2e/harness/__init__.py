"""Helpers of the scenarios and the demo.

installation    cluster, images and chart, each updated to the state of the working tree
namespace       a namespace: apply, wait, inspect, and report failures
client          OpenAI clients that reach a model's Service from a pod of its namespace
asking          questions to the demo model, with the expected answers
models          InferenceModels for the scenarios
hub             a Hub that pods can reach, and models from it
traffic         requests without a pause while something happens, and their results
nodes           nodes that are drained, lose their kubelet or fail
hung            processes that no signal ends
writes          write requests of the operators, from the API server's audit log
host            state of the host that a cluster must not change
"""
