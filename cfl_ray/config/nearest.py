"""The valid key that an unknown key probably means: by its name in other libraries, its section, or its spelling."""

from collections.abc import Iterable

from cfl_ray.errors import nearest

# names of keys in scripts and libraries of the field, by the key that has this meaning here
_ELSEWHERE = {
    "rounds": "num_rounds n_rounds comm_round comm_rounds num_comm_rounds communication_rounds global_rounds "
    "global_round global_epoch global_epochs server_rounds num_server_rounds",
    "seed": "random_seed manual_seed random_state",
    "methods": "algorithm algorithms algo method strategy",
    "output": "output_dir out_dir save_dir save_path log_dir logdir results_dir",
    "data.source": "dataset dataset_name data_name",
    "data.root": "data_dir data_path dataset_dir datadir",
    "data.partition.clients": "num_clients n_clients nclients total_clients num_users n_users client_num "
    "client_num_in_total n_parties num_partitions",
    "data.partition.kind": "partitioner partition_method partition_type",
    "data.partition.alpha": "dirichlet_alpha dir_alpha partition_alpha",
    "data.partition.min_samples": "min_size min_partition_size least_samples",
    "data.partition.classes_per_client": "class_per_client labels_per_client num_classes_per_client shards_per_client",
    "data.test.fraction": "test_size test_ratio test_fraction test_split",
    "model.name": "arch architecture model_name net network",
    "local.lr": "learning_rate local_lr local_learning_rate client_lr lr_local eta",
    "local.batch_size": "batch bs batchsize local_bs local_batch_size train_batch_size b_size",
    "local.epochs": "local_epochs local_epoch local_ep num_epochs n_epochs client_epochs train_epochs",
    "local.steps": "local_steps num_steps n_steps local_iterations",
    "local.weight_decay": "wd reg l2 decay",
    "local.optimizer": "optim client_optimizer local_optimizer",
    "local.clip_norm": "grad_clip clip_grad max_grad_norm gradient_clip",
    "cohort.fraction": "frac join_ratio sample_ratio client_fraction fraction_fit participation_rate "
    "client_participation participation",
    "cohort.clients": "clients_per_round num_clients_per_round client_num_per_round min_fit_clients num_join_clients",
    "cohort.dropout": "client_drop_rate drop_rate dropout_rate",
    "evaluation.every": "eval_gap eval_every eval_interval test_interval eval_freq frequency_of_the_test",
    "runtime.gpus_per_host": "gpus num_gpus n_gpus gpus_per_client client_gpus",
    "runtime.cpus_per_host": "cpus num_cpus n_cpus cpus_per_client client_cpus",
    "runtime.hosts": "workers num_workers n_workers num_processes",
    "runtime.device": "cuda gpu device_name",
    "runtime.precision": "dtype amp mixed_precision",
}
SYNONYMS = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}


def nearest_key(wanted: str, siblings: Iterable[str], keys: Iterable[str]) -> str | None:
    """The dotted key that an unknown one probably means; None if none is near.

    siblings: the keys of its section, without the section. keys: dotted, of the whole config.
    """
    (parent, _, last), siblings, keys = wanted.rpartition("."), list(siblings), list(keys)
    section, by_depth = f"{parent}." if parent else "", sorted(keys, key=lambda key: key.count("."))
    inside = [key for key in by_depth if key.startswith(section) and _last(key) == last]
    elsewhere = [key for key in by_depth if _last(key) == last]
    meant = SYNONYMS.get(last.lower().replace("-", "_"))
    if similar := nearest(last, siblings, 0.8):
        return section + similar
    if inside:
        return inside[0]
    if meant is not None and _last(meant) in siblings:
        return section + _last(meant)
    if meant in keys:
        return meant
    if elsewhere:
        return elsewhere[0]
    if similar := nearest(last, siblings):
        return section + similar
    by_last = {_last(key): key for key in reversed(by_depth)}
    similar = nearest(last, by_last, 0.7)
    return None if similar is None else by_last[similar]


def _last(key: str) -> str:
    return key.rpartition(".")[2]
