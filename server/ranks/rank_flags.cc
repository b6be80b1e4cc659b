#include "server/ranks/rank_flags.h"

#include <grpcpp/security/credentials.h>
#include <sys/random.h>

#include <algorithm>
#include <array>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/cli/flags.h"
#include "base/status_macros.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::cli {
namespace {

constexpr int kMaxTp = static_cast<int>(worker::kMaxTpSize);

constexpr char kGroup[] = "Tensor parallel";

// Adds the flags that both the leader and the other ranks have.
void AddGroupFlags(CLI::App* app, RankFlags* flags) {
  AddFlag(app, "--collective", flags->collective,
          "the library over which ranks exchange activations; auto: "
          "nccl on GPUs, otherwise gloo")
      ->check(CLI::IsMember({"auto", "gloo", "nccl"}))
      ->group(kGroup);
  AddText(app, "--nccl-library", flags->nccl_library,
          "file of the library for --collective nccl; default: the "
          "libnccl.so.2 that the system finds")
      ->type_name("FILE")
      ->group(kGroup);
  AddText(app, "--rank-interface", flags->interface,
          "network interface, or with gloo an address of this host, "
          "over which ranks exchange activations, not encrypted; "
          "default if all ranks are on one host: loopback, or with "
          "nccl NCCL's choice")
      ->type_name("NAME|ADDRESS")
      ->group(kGroup);
  AddText(app, "--rank-secret-file", flags->secret_file,
          "file with the secret that ranks of other hosts must show to "
          "the leader")
      ->type_name("FILE")
      ->group(kGroup);
  AddText(app, "--rank-tls-cert", flags->tls.certificate,
          "PEM certificate chain that ranks of different hosts show "
          "each other")
      ->type_name("FILE")
      ->group(kGroup);
  AddText(app, "--rank-tls-key", flags->tls.key, "PEM key of --rank-tls-cert")
      ->type_name("FILE")
      ->group(kGroup);
  AddText(app, "--rank-tls-ca", flags->tls.ca,
          "PEM authorities that sign the ranks' certificates")
      ->type_name("FILE")
      ->group(kGroup);
  AddText(app, "--rank-tls-names", flags->tls.names,
          "DNS, URI or IP names; a rank's certificate must have one of "
          "them; default: any certificate that --rank-tls-ca has "
          "signed, and for the leader's certificate the host that is "
          "called")
      ->delimiter(',')
      ->group(kGroup);
  AddFlag(app, "--rank-metrics-port", flags->metrics_port,
          "metrics ports of the ranks that this command starts: the "
          "i-th rank after the first has this port + i; 0: free ports, "
          "which the ready file lists")
      ->check(CLI::Range(0, 65535 - kMaxTp))
      ->group(kGroup);
  AddDuration(app, "--rank-join-timeout", flags->join_timeout,
              "how long ranks wait for each other at the start")
      ->group(kGroup);
  AddDuration(app, "--rank-heartbeat-timeout", flags->heartbeat_timeout,
              "a rank that sends nothing for this long is treated as lost, "
              "and the group fails")
      ->group(kGroup);
}

bool GivesTls(const RankTlsFlags& tls) {
  return !tls.certificate.empty() || !tls.key.empty() || !tls.ca.empty();
}

base::TlsOptions TlsOptionsOf(const RankTlsFlags& tls) {
  base::TlsOptions options;
  options.files.certificate = tls.certificate;
  options.files.certificate_flag = "--rank-tls-cert";
  options.files.key = tls.key;
  options.files.key_flag = "--rank-tls-key";
  options.files.authorities = tls.ca;
  options.files.authorities_flag = "--rank-tls-ca";
  options.names = tls.names;
  options.names_flag = "--rank-tls-names";
  options.role = "ranks";
  return options;
}

absl::Status CheckCommon(const RankFlags& flags) {
  if (flags.tp < 1 || flags.tp > kMaxTp) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--tp ", flags.tp, ": the number of ranks must be 1 to ", kMaxTp));
  }
  if (flags.heartbeat_timeout < absl::Milliseconds(100) ||
      flags.heartbeat_timeout > absl::Hours(1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--rank-heartbeat-timeout ",
        absl::FormatDuration(flags.heartbeat_timeout), " must be 100ms to 1h"));
  }
  const RankTlsFlags& tls = flags.tls;
  if ((GivesTls(tls) || !tls.names.empty()) &&
      (tls.certificate.empty() || tls.key.empty() || tls.ca.empty())) {
    return absl::InvalidArgumentError(
        "each rank both shows and checks certificates, so --rank-tls-cert, "
        "--rank-tls-key and --rank-tls-ca must be given together; "
        "--rank-tls-names needs all three");
  }
  if (!flags.nccl_library.empty() && flags.collective != "nccl") {
    return absl::InvalidArgumentError(
        absl::StrCat("--nccl-library ", flags.nccl_library,
                     " has an effect only with --collective nccl"));
  }
  return absl::OkStatus();
}

// Refuses flags that would have no effect: those for ranks of other hosts if no
// such rank can join, and those for several ranks if there is only one rank.
absl::Status CheckRead(const RankFlags& flags) {
  if (flags.listen.empty() &&
      (GivesTls(flags.tls) || !flags.secret_file.empty())) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.secret_file.empty() ? "--rank-tls-cert" : "--rank-secret-file",
        " has an effect only for ranks on other hosts, which join at "
        "--rank-listen: give --rank-listen, too"));
  }
  if (flags.tp > 1) return absl::OkStatus();
  const char* const unread = !flags.interface.empty()     ? "--rank-interface"
                             : flags.collective != "auto" ? "--collective"
                                                          : nullptr;
  if (unread == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      unread, " has an effect only with several ranks, but --tp is 1"));
}

}  // namespace

void AddLeaderFlags(CLI::App* app, RankFlags* flags) {
  AddFlag(app, "--tp", flags->tp,
          "number of tensor-parallel ranks among which the model is "
          "divided; each is a process, and this process is the first")
      ->check(CLI::Range(1, kMaxTp))
      ->group(kGroup);
  AddFlag(app, "--local-ranks", flags->local_ranks,
          "number of these ranks that run on this host, started by "
          "this command and including it; each has an equal share of "
          "the cores, or its own GPU; 0: all")
      ->check(CLI::Range(0, kMaxTp))
      ->group(kGroup);
  AddText(app, "--rank-listen", flags->listen,
          "HOST:PORT at which ranks of other hosts join (kvasir rank "
          "--leader); needed if --local-ranks is less than --tp")
      ->check(Checked([](const std::string& text) {
        return ParseListen(text, "--rank-listen").status();
      }))
      ->type_name("HOST:PORT")
      ->group(kGroup);
  AddGroupFlags(app, flags);
}

void AddFollowerFlags(CLI::App* app, RankFlags* flags) {
  AddText(app, "--leader", flags->leader,
          "HOST:PORT of the leader's --rank-listen; the rank waits "
          "until it can connect")
      ->check(Checked([](const std::string& text) {
        return ParseListen(text, "--leader").status();
      }))
      ->type_name("HOST:PORT");
  // The help must not show a default value, because --rank and --tp
  // are required.
  AddFlag(app, "--rank", flags->rank,
          "the number of this rank, from 1 on (the leader is rank 0)")
      ->check(CLI::Range(1, kMaxTp - 1))
      ->default_str("");
  AddFlag(app, "--tp", flags->tp,
          "number of ranks in the group; must equal the leader's --tp")
      ->check(CLI::Range(2, kMaxTp))
      ->default_str("");
  flags->local_ranks = 1;
  AddFlag(app, "--local-ranks", flags->local_ranks,
          "number of ranks that run on this host, started by this "
          "command and including it, with numbers from --rank on; each "
          "has an equal share of the cores, or its own GPU")
      ->check(CLI::Range(1, kMaxTp))
      ->group(kGroup);
  // A hidden flag. The command that starts a rank sets it.
  app->add_option("--join-fd", flags->join_fd)->group("")->configurable(false);
  AddGroupFlags(app, flags);
}

absl::Status CheckLeaderFlags(const RankFlags& flags) {
  KVASIR_RETURN_IF_ERROR(CheckCommon(flags));
  if (flags.local_ranks > flags.tp) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--local-ranks ", flags.local_ranks,
        " must not be more than the number of all ranks, --tp ", flags.tp));
  }
  const bool several_hosts = flags.num_local() < flags.tp;
  if (several_hosts == flags.listen.empty()) {
    return absl::InvalidArgumentError(
        several_hosts
            ? absl::StrCat("--tp ", flags.tp, " with --local-ranks ",
                           flags.num_local(),
                           ": the other ranks run on other hosts and join at "
                           "the address of --rank-listen HOST:PORT, so this "
                           "flag is needed")
            : absl::StrCat(
                  "--rank-listen ", flags.listen,
                  " is for ranks on other hosts, but all ranks of --tp ",
                  flags.tp,
                  " are started on this host; if some run on other hosts, give "
                  "--local-ranks, the number of ranks on this host"));
  }
  if (several_hosts && flags.interface.empty()) {
    return absl::InvalidArgumentError(
        "ranks on several hosts need --rank-interface, the "
        "network interface over which activations are sent without "
        "encryption");
  }
  if (several_hosts && flags.secret_file.empty() && flags.tls.ca.empty()) {
    return absl::InvalidArgumentError(
        "ranks on several hosts must authenticate: give "
        "--rank-tls-cert, --rank-tls-key and --rank-tls-ca, or "
        "--rank-secret-file");
  }
  return CheckRead(flags);
}

absl::Status CheckFollowerFlags(const RankFlags& flags) {
  KVASIR_RETURN_IF_ERROR(CheckCommon(flags));
  if (flags.leader.empty() && flags.join_fd < 0) {
    return absl::InvalidArgumentError(
        "a rank must know the address of its leader: give --leader HOST:PORT");
  }
  if (flags.tp < 2) {
    return absl::InvalidArgumentError(
        "a rank must know the number of all ranks: give --tp with the "
        "same value as the leader's");
  }
  if (flags.rank < 1 || flags.rank >= flags.tp) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--rank ", flags.rank, " with --tp ", flags.tp, " must be 1 to ",
        flags.tp - 1, " (the leader is rank 0)"));
  }
  if (flags.rank + flags.local_ranks > flags.tp) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--rank ", flags.rank, " with --local-ranks ", flags.local_ranks,
        " would start ranks up to ", flags.rank + flags.local_ranks - 1,
        ", but the last rank of --tp ", flags.tp, " is ", flags.tp - 1));
  }
  if (flags.join_fd < 0 && flags.interface.empty() &&
      !base::IsLocalTarget(flags.leader)) {
    return absl::InvalidArgumentError(
        "ranks on several hosts need --rank-interface, the "
        "network interface over which activations are sent without "
        "encryption");
  }
  return absl::OkStatus();
}

std::string CollectiveOf(const RankFlags& flags, const DeviceFlags& device) {
  if (flags.collective != "auto") return flags.collective;
  return device.device == "cpu" ? "gloo" : "nccl";
}

absl::Status CheckCollective(const RankFlags& flags,
                             const DeviceFlags& device) {
  if (flags.tp == 1) return absl::OkStatus();
  if (device.device == "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device auto with --tp ", flags.tp,
                     ": all ranks must run on the same kind of device: give "
                     "--device cpu or --device cuda"));
  }
  const bool gloo = CollectiveOf(flags, device) == "gloo";
  if (gloo == (device.device == "cpu")) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--collective ", flags.collective, " with --device ", device.device,
      " does not work: give --collective ", gloo ? "nccl" : "gloo"));
}

absl::StatusOr<std::string> ReadSecret(const std::string& path) {
  if (path.empty()) return std::string();
  return ReadSecretFile("--rank-secret-file", path);
}

std::string NewSecret() {
  std::array<char, 32> bytes;
  KVASIR_CHECK(getrandom(bytes.data(), bytes.size(), 0) ==
               static_cast<ssize_t>(bytes.size()));
  return absl::BytesToHexString(absl::string_view(bytes.data(), bytes.size()));
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> RankListenCredentials(
    const RankFlags& flags, const base::ListenAddress& listen, bool insecure,
    base::TlsWatch* watch) {
  if (GivesTls(flags.tls)) return watch->Server(TlsOptionsOf(flags.tls));
  KVASIR_RETURN_IF_ERROR(base::CheckPlaintext(
      listen, insecure,
      "give --rank-tls-cert, --rank-tls-key and --rank-tls-ca"));
  return nullptr;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> RankDialCredentials(
    const RankFlags& flags, const std::string& leader, bool insecure,
    base::TlsWatch* watch) {
  if (GivesTls(flags.tls)) return watch->Channel(TlsOptionsOf(flags.tls));
  KVASIR_RETURN_IF_ERROR(CheckPlainCall(leader, "--rank-tls-ca", insecure));
  return grpc::InsecureChannelCredentials();
}

}  // namespace kvasir::cli
