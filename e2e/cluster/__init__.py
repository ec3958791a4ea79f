"""A real Kubernetes on one machine, each node in namespaces of its own: `python -m cluster --help` names the commands.

    commands        up, down, status, kubectl, load, expose ...    (`__main__.py`)
    lifecycle       brings all of it up, and takes it down
    control_plane   etcd, API server, controllers, scheduler, DNS
    node            containerd, kubelet, kube-proxy and network policies of one node
    images          gets images onto nodes; oci packs them
    relay           ports of the host's loopback that lead into the cluster
    certificates    the keys and kubeconfigs of all components
    places          namespaces, and processes in them
    tools           builds the programs from their Go modules, once
    layout          directories and addresses

Every layer imports only those below it. The host's network has no part in the cluster, and one kill ends all of it.
"""
