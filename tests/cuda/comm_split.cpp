// ncclCommSplit for the null CUDA device, which has none: all ranks of a communicator exchange color, key and a new id,
// and those of one color join the id of their first rank. Built by `make test-cuda`.
#include <algorithm>
#include <utility>
#include <vector>

extern "C" {
typedef struct { char internal[128]; } ncclUniqueId;
int ncclCommCount(void* comm, int* count);
int ncclCommUserRank(void* comm, int* rank);
int ncclGetUniqueId(ncclUniqueId* id);
int ncclAllGather(const void* send, void* receive, unsigned long count, int type, void* comm, void* stream);
int ncclCommInitRank(void** comm, int ranks, ncclUniqueId id, int rank);

int ncclCommSplit(void* comm, int color, int key, void** made, void*) {
    struct Ask { int color, key; ncclUniqueId id; } mine = {color, key, {}};
    int count, rank;
    ncclCommCount(comm, &count);
    ncclCommUserRank(comm, &rank);
    ncclGetUniqueId(&mine.id);
    std::vector<Ask> all(count);
    ncclAllGather(&mine, all.data(), sizeof(Ask), /* bytes */ 0, comm, nullptr);
    *made = nullptr;
    if (color < 0) return 0;
    std::vector<std::pair<int, int>> members;  // (key, rank)
    for (int other = 0; other < count; other++)
        if (all[other].color == color) members.push_back({all[other].key, other});
    std::sort(members.begin(), members.end());
    int place = std::find(members.begin(), members.end(), std::make_pair(key, rank)) - members.begin();
    return ncclCommInitRank(made, members.size(), all[members[0].second].id, place);
}
}
