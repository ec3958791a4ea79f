"""A real Kubernetes on one machine, with each node in separate namespaces: see `python -m cluster --help`.

    commands        up, down, status, kubectl, load, expose ...    (`__main__.py`)
    lifecycle       starts and stops the cluster
    control_plane   etcd, API server, controllers, scheduler, DNS
    node            containerd, kubelet, kube-proxy and network policies of one node
    images          loads images onto nodes; oci packs them
    relay           forwards ports of the host's loopback into the cluster, by processes of relay_process
    certificates    keys and kubeconfigs of all components
    places          namespaces, and processes in them
    tools           builds the programs from their Go modules, once
    layout          directories and addresses

Each module imports only modules below it. The cluster does not use the host's network, and killing one process stops
all of it.
"""
