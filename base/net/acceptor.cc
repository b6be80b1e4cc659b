#include "base/net/acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

constexpr int kBacklog = 1024;
// If no file descriptors are free, the acceptor waits this long before it tries
// again to accept connections.
constexpr absl::Duration kPause = absl::Milliseconds(50);
// A probe is a connection that the acceptor makes to itself. It may take at
// most this long to arrive.
constexpr absl::Duration kProbePatience = absl::Seconds(1);
constexpr absl::Duration kBetweenLogLines = absl::Seconds(10);

absl::Status BindError(const ListenAddress& listen, absl::string_view where,
                       absl::string_view cause) {
  return absl::FailedPreconditionError(
      absl::StrCat("cannot listen on ", where, ": ", cause,
                   "; choose another address with ", listen.flag));
}

absl::Status CheckUnixPath(const ListenAddress& listen) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (listen.unix_path.size() >= sizeof(address.sun_path)) {
    return BindError(
        listen, listen.unix_path,
        absl::StrCat("the path has ", listen.unix_path.size(),
                     " bytes, but a Unix socket's path may have at most ",
                     sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, listen.unix_path.data(),
              listen.unix_path.size());
  const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) {
    return BindError(
        listen, listen.unix_path,
        absl::StrCat("cannot create a socket: ", std::strerror(errno)));
  }
  const bool served = ::connect(probe, reinterpret_cast<sockaddr*>(&address),
                                sizeof(address)) == 0;
  ::close(probe);
  if (served) {
    return BindError(listen, listen.unix_path, "another process serves it");
  }
  return absl::OkStatus();
}

absl::Status TryTcp(const ListenAddress& listen) {
  const std::string where = JoinHostPort(listen.host, listen.port);
  if (listen.port < 0 || listen.port > 65535) {
    return BindError(listen, where, "a port must be from 0 to 65535");
  }
  const ListenTrouble trouble = ProbeListen(listen.host, listen.port);
  switch (trouble.with) {
    case ListenTrouble::With::kHost:
      return absl::FailedPreconditionError(absl::StrCat(
          "cannot listen on ", where, ": ", trouble.cause, "; use ",
          listen.host_flag, " to choose a host other than ", listen.host));
    case ListenTrouble::With::kPort:
      return BindError(listen, where, trouble.cause);
    case ListenTrouble::With::kNothing:
      break;
  }
  return absl::OkStatus();
}

void SetPort(int port, sockaddr_storage* address) {
  const in_port_t bytes = htons(static_cast<uint16_t>(port));
  if (address->ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = bytes;
  } else if (address->ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = bytes;
  }
}

int PortOf(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// Returns the inode of the socket at a descriptor; 0 if there is none. The
// descriptor's owner may close it at the same time. ThreadSanitizer would
// report this as a race in `fstat`, but not in `fstatat`.
ino_t SocketAt(int descriptor) {
  struct stat file = {};
  const bool socket = ::fstatat(descriptor, "", &file, AT_EMPTY_PATH) == 0 &&
                      S_ISSOCK(file.st_mode);
  return socket ? file.st_ino : 0;
}

void ShutDown(int connection, ino_t inode) {
  // Work on a duplicate, because the descriptor itself may be closed and its
  // number reused between the check and the shutdown.
  const int copy = ::fcntl(connection, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return;
  if (SocketAt(copy) == inode) ::shutdown(copy, SHUT_RDWR);
  ::close(copy);
}

bool OutOfDescriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS ||
         error == ENOMEM;
}

// Returns true if accept() failed because of one connection, for example
// because the client has already closed it. The listening socket still
// works then.
bool IsOneConnectionsError(int error) {
  switch (error) {
    case EINTR:
    case ECONNABORTED:
    case EPROTO:
    case EPERM:
    case ENETDOWN:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool Acceptor::Address::operator==(const Address& other) const {
  return size == other.size && std::memcmp(&bytes, &other.bytes, size) == 0;
}

Acceptor::Acceptor(const ListenAddress& listen)
    : listen_(listen), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Acceptor::~Acceptor() {
  StopListening();
  CloseAll();
  if (wake_ >= 0) ::close(wake_);
}

absl::Status Acceptor::Check(const ListenAddress& listen) {
  return listen.unix_path.empty() ? TryTcp(listen) : CheckUnixPath(listen);
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(
    const ListenAddress& listen) {
  auto acceptor = std::unique_ptr<Acceptor>(new Acceptor(listen));
  KVASIR_RETURN_IF_ERROR(Check(listen));
  if (listen.unix_path.empty()) {
    KVASIR_RETURN_IF_ERROR(acceptor->ListenTcp());
    return acceptor;
  }
  Socket socket;
  KVASIR_RETURN_IF_ERROR(acceptor->ListenUnix(&socket));
  acceptor->sockets_.push_back(socket);
  acceptor->target_ = absl::StrCat("unix:", listen.unix_path);
  return acceptor;
}

int Acceptor::Bind(const Address& address) {
  const int fd =
      ::socket(address.bytes.ss_family,
               SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, /*protocol=*/0);
  if (fd < 0) return -1;
  const int on = 1;
  if (address.bytes.ss_family != AF_UNIX) {
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  }
  if (::bind(fd, address.get(), address.size) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

// Listens on all addresses of the host, with the same port.
absl::Status Acceptor::ListenTcp() {
  const std::string where = JoinHostPort(listen_.host, listen_.port);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(
      listen_.host.c_str(), absl::StrCat(listen_.port).c_str(), &hints, &found);
  if (error != 0) return BindError(listen_, where, ::gai_strerror(error));
  port_ = listen_.port;
  std::string cause = "the host has no address";
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    Socket socket;
    socket.address.size = at->ai_addrlen;
    std::memcpy(&socket.address.bytes, at->ai_addr, at->ai_addrlen);
    SetPort(port_, &socket.address.bytes);
    socket.listening = Bind(socket.address);
    if (socket.listening < 0 || ::listen(socket.listening, kBacklog) != 0) {
      cause = std::strerror(errno);
      if (socket.listening >= 0) ::close(socket.listening);
      continue;
    }
    socklen_t size = sizeof(socket.address.bytes);
    ::getsockname(socket.listening, socket.address.get(), &size);
    port_ = PortOf(socket.address.bytes);
    sockets_.push_back(socket);
  }
  ::freeaddrinfo(found);
  if (sockets_.empty()) return BindError(listen_, where, cause);
  target_ = JoinHostPort(listen_.host, port_);
  return absl::OkStatus();
}

absl::Status Acceptor::ListenUnix(Socket* socket) {
  auto* address = reinterpret_cast<sockaddr_un*>(&socket->address.bytes);
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path, listen_.unix_path.data(),
              listen_.unix_path.size());
  socket->address.size = sizeof(sockaddr_un);
  // No process serves the path (CheckUnixPath has tried), so a socket file
  // there is left over from a process that has ended.
  struct stat file;
  if (::stat(listen_.unix_path.c_str(), &file) == 0 && S_ISSOCK(file.st_mode)) {
    ::unlink(listen_.unix_path.c_str());
  }
  socket->listening = Bind(socket->address);
  if (socket->listening < 0) {
    return BindError(listen_, listen_.unix_path, std::strerror(errno));
  }
  // Set the mode before `listen`, because no client can connect until then.
  if ((listen_.unix_mode != 0 &&
       ::chmod(listen_.unix_path.c_str(), listen_.unix_mode) != 0) ||
      ::listen(socket->listening, kBacklog) != 0) {
    const std::string cause = std::strerror(errno);
    ::close(socket->listening);
    socket->listening = -1;
    return BindError(listen_, listen_.unix_path, cause);
  }
  if (::stat(listen_.unix_path.c_str(), &file) == 0) {
    unix_file_ = {file.st_dev, file.st_ino};
  }
  return absl::OkStatus();
}

void Acceptor::Run(Options options) {
  options_ = std::move(options);
  thread_ = std::thread([this] { Loop(); });
}

void Acceptor::StopListening() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof(one));
  thread_.join();
}

bool Acceptor::Wait(absl::Duration timeout, bool also_listen) {
  std::vector<pollfd> waits = {{.fd = wake_, .events = POLLIN, .revents = 0}};
  for (const Socket& socket : sockets_) {
    if (also_listen && socket.listening >= 0) {
      waits.push_back({.fd = socket.listening, .events = POLLIN, .revents = 0});
    }
  }
  const int milliseconds = static_cast<int>(
      absl::ToInt64Milliseconds(absl::Ceil(timeout, absl::Milliseconds(1))));
  if (::poll(waits.data(), waits.size(), milliseconds) <= 0) return false;
  return std::any_of(waits.begin() + 1, waits.end(),
                     [](const pollfd& at) { return at.revents != 0; });
}

void Acceptor::Loop() {
  while (!stopping_) {
    const bool unheard =
        std::any_of(sockets_.begin(), sockets_.end(), [](const Socket& socket) {
          return socket.probe >= 0 || socket.listening < 0;
        });
    const bool somebody =
        Wait(unheard ? std::min(kProbePatience, options_.probe_interval)
                     : options_.probe_interval,
             /*also_listen=*/true);
    if (stopping_) break;
    bool enough = true;
    for (Socket& socket : sockets_) {
      if (socket.listening < 0) {
        Reopen(&socket, "");
      } else if (somebody) {
        enough &= AcceptAll(&socket);
      } else if (socket.probe >= 0) {
        Reopen(&socket, "its own probe connection does not arrive");
      } else {
        Probe(&socket);
      }
    }
    // Without free descriptors, new connections stay in the system's queue.
    if (!enough) Wait(kPause, /*also_listen=*/false);
  }
  for (Socket& socket : sockets_) AcceptAll(&socket);
  CloseAll();
}

// Accepts at most kBacklog connections per call, so that a constant stream of
// clients delays neither the other sockets nor the shutdown.
bool Acceptor::AcceptAll(Socket* socket) {
  for (int i = 0; i < kBacklog && socket->listening >= 0; ++i) {
    Address from;
    from.size = sizeof(from.bytes);
    const int connection = ::accept4(socket->listening, from.get(), &from.size,
                                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection >= 0) {
      if (socket->probe >= 0 && from == socket->probe_address) {
        ::close(connection);
        EndProbe(socket);
      } else {
        Take(connection);
      }
      continue;
    }
    if (errno == EAGAIN) return true;
    if (IsOneConnectionsError(errno)) continue;
    if (OutOfDescriptors(errno)) {
      const absl::Time now = Clock::Real().Now();
      if (now - logged_at_ >= kBetweenLogLines) {
        logged_at_ = now;
        LogWarning("connections wait for free descriptors",
                   {{"listen", target_}, {"cause", std::strerror(errno)}});
      }
      return false;
    }
    Reopen(socket, std::strerror(errno));
  }
  return true;
}

void Acceptor::Take(int connection) {
  const int on = 1;
  if (port_ != 0) {
    ::setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  bool full = false;
  {
    MutexLock lock(&mutex_);
    const size_t most = options_.max_connections;
    if (open_.size() >= most) Forget();
    full = open_.size() >= (options_.replace_oldest ? 2 * most : most);
    if (!full) {
      // The table can be this full only if replace_oldest is set.
      if (open_.size() >= most) ShutDownOldest();
      open_[connection] = {.inode = SocketAt(connection),
                           .number = num_accepted_++};
    }
  }
  if (!full) {
    options_.take(connection);
    return;
  }
  ::close(connection);
  ++num_closed_;
  const absl::Time now = Clock::Real().Now();
  if (now - logged_at_ < kBetweenLogLines) return;
  logged_at_ = now;
  LogWarning("too many connections", {{"listen", target_},
                                      {"limit", options_.max_connections},
                                      {"closed", num_closed_}});
}

void Acceptor::Probe(Socket* socket) {
  Address to = socket->address;
  // A client cannot connect to a wildcard address, so use the loopback address
  // of the same family.
  if (to.bytes.ss_family == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&to.bytes);
    if (v4->sin_addr.s_addr == htonl(INADDR_ANY)) {
      v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
  } else if (to.bytes.ss_family == AF_INET6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&to.bytes);
    if (IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr)) {
      v6->sin6_addr = in6addr_loopback;
    }
  }
  const int probe = ::socket(to.bytes.ss_family,
                             SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0)
    return;  // no descriptor is free, so a probe could not show anything
  if (to.bytes.ss_family == AF_UNIX) {
    // Let the system give the probe a unique name, by which AcceptAll
    // distinguishes it from clients' connections.
    const sa_family_t family = AF_UNIX;
    ::bind(probe, reinterpret_cast<const sockaddr*>(&family), sizeof(family));
  }
  const bool called = ::connect(probe, to.get(), to.size) == 0 ||
                      errno == EINPROGRESS || errno == EAGAIN;
  const std::string cause = std::strerror(errno);
  socket->probe = probe;
  socket->probe_address = {};
  socket->probe_address.size = sizeof(socket->probe_address.bytes);
  ::getsockname(probe, socket->probe_address.get(),
                &socket->probe_address.size);
  if (!called) Reopen(socket, cause);
}

void Acceptor::EndProbe(Socket* socket) {
  if (socket->probe >= 0) ::close(socket->probe);
  socket->probe = -1;
}

void Acceptor::Reopen(Socket* socket, const std::string& why) {
  EndProbe(socket);
  const absl::Time now = Clock::Real().Now();
  if (socket->listening < 0 && now - socket->opened_at < kProbePatience) return;
  socket->opened_at = now;
  if (!why.empty()) {
    LogWarning("listening again", {{"listen", target_}, {"cause", why}});
  }
  if (socket->listening >= 0) ::close(socket->listening);
  socket->listening = -1;
  const absl::Status status = OpenAgain(socket);
  if (status.ok()) return;
  LogError("cannot listen again", {{"cause", std::string(status.message())}});
}

absl::Status Acceptor::OpenAgain(Socket* socket) {
  if (!listen_.unix_path.empty()) {
    KVASIR_RETURN_IF_ERROR(CheckUnixPath(listen_));
    return ListenUnix(socket);
  }
  const int fd = Bind(socket->address);
  if (fd >= 0 && ::listen(fd, kBacklog) == 0) {
    socket->listening = fd;
    return absl::OkStatus();
  }
  const std::string cause = std::strerror(errno);
  if (fd >= 0) ::close(fd);
  return BindError(listen_, target_, cause);
}

void Acceptor::CloseAll() {
  for (Socket& socket : sockets_) {
    EndProbe(&socket);
    if (socket.listening >= 0) ::close(socket.listening);
    socket.listening = -1;
  }
  struct stat file;
  if (!listen_.unix_path.empty() && !sockets_.empty() &&
      ::stat(listen_.unix_path.c_str(), &file) == 0 &&
      unix_file_ == std::pair(file.st_dev, file.st_ino)) {
    ::unlink(listen_.unix_path.c_str());
  }
  sockets_.clear();
}

// Removes closed connections from the table. If a closed descriptor's number
// belongs to another file by now, the inode differs.
void Acceptor::Forget() {
  std::erase_if(open_, [](const std::pair<const int, Open>& entry) {
    return SocketAt(entry.first) != entry.second.inode;
  });
}

size_t Acceptor::connections() {
  MutexLock lock(&mutex_);
  Forget();
  return open_.size();
}

void Acceptor::HangUp() {
  MutexLock lock(&mutex_);
  for (const auto& [connection, open] : open_) ShutDown(connection, open.inode);
}

// The connection stays in the table until its owner has closed it.
void Acceptor::ShutDownOldest() {
  Open* oldest = nullptr;
  int connection = -1;
  for (auto& [descriptor, open] : open_) {
    if (open.shut_down) continue;
    if (oldest != nullptr && oldest->number < open.number) continue;
    oldest = &open;
    connection = descriptor;
  }
  if (oldest == nullptr) return;
  oldest->shut_down = true;
  ShutDown(connection, oldest->inode);
}

}  // namespace kvasir::base
