"""The Pod Security Standard "restricted" (kubernetes.io/docs/concepts/security/pod-security-standards), which includes
the standard "baseline"."""

# `image` since Kubernetes 1.33.
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret"}
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def _actions(container):
    """The probes and hooks of a container."""
    hooks = container.get("lifecycle", {})
    return [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container] + [
        hooks[name] for name in ("postStart", "preStop") if name in hooks]


def violations(pod, annotations=None):
    """The fields of a pod's spec that admission would refuse: [path]."""
    found = []
    whole = pod.get("securityContext", {})
    containers = [(f"{kind}.{each['name']}", each) for kind in ("containers", "initContainers", "ephemeralContainers")
                  for each in pod.get(kind, [])]
    contexts = [("", whole), *((f"{name}.", each.get("securityContext", {})) for name, each in containers)]

    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    for volume in pod.get("volumes", []):
        found += [f"volumes.{volume['name']}.{kind}" for kind in volume.keys() - {"name"} - VOLUMES]
    found += [f"sysctls.{each['name']}" for each in whole.get("sysctls", []) if each["name"] not in SYSCTLS]
    for key, value in (annotations or {}).items():
        if key.startswith("container.apparmor.security.beta.kubernetes.io/") and not (
                value == "runtime/default" or value.startswith("localhost/")):
            found.append("appArmor")
    for path, context in contexts:
        if context.get("windowsOptions", {}).get("hostProcess"):
            found.append(f"{path}hostProcess")
        if context.get("runAsUser") == 0:
            found.append(f"{path}runAsUser")
        if context.get("seccompProfile", {}).get("type") not in (None, "RuntimeDefault", "Localhost"):
            found.append(f"{path}seccompProfile")
        if context.get("appArmorProfile", {}).get("type") not in (None, "RuntimeDefault", "Localhost"):
            found.append(f"{path}appArmorProfile")
        linux = context.get("seLinuxOptions", {})
        if linux.get("type") not in SELINUX_TYPES or linux.get("user") or linux.get("role"):
            found.append(f"{path}seLinuxOptions")
    for name, each in containers:
        context = each.get("securityContext", {})
        if context.get("privileged"):
            found.append(f"{name}.privileged")
        if context.get("procMount") not in (None, "Default"):
            found.append(f"{name}.procMount")
        if context.get("allowPrivilegeEscalation") is not False:
            found.append(f"{name}.allowPrivilegeEscalation")
        if context.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
            found.append(f"{name}.runAsNonRoot")
        if "seccompProfile" not in context and "seccompProfile" not in whole:
            found.append(f"{name}.seccompProfile")
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            found.append(f"{name}.capabilities.drop")
        if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            found.append(f"{name}.capabilities.add")
        found += [f"{name}.hostPort" for port in each.get("ports", []) if port.get("hostPort")]
        found += [f"{name}.host" for action in _actions(each) for kind in ("httpGet", "tcpSocket")
                  if action.get(kind, {}).get("host")]
    return found
