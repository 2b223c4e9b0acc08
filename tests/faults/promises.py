"""The faults FVC is tested against and what it promises for each: the rows of the table ``make faults`` prints.

*Resume-equal*: the final weights, predictions and metric log are bit-identical (CPU, same versions and threads) to
those of a run that was never disturbed.
"""

# By number: (fault, promise).
PROMISES = dict(
    enumerate(
        [
            ("kill -9 in each stage", "finished stages are not redone; resume-equal"),
            ("kill -9 at every file operation of a checkpoint", "the old or the new one loads; temporaries are swept"),
            ("kill -9 twice within one epoch", "resume-equal"),
            ("kill -9 between writing best and latest", "the two stay consistent"),
            ("SIGTERM or SIGUSR1 in mid-step", "saved at the step's end; exit 75"),
            ("SIGTERM during a save", "the save finishes, or the previous one stands"),
            ("corrupt video", "rejected with file and reason; a share of them stops the run"),
            ("truncated video", "used only if the frames asked for exist; else rejected"),
            ("zero-byte, audio-only, renamed text, encrypted", "rejected with file and reason"),
            ("video gone after indexing", "named before training starts"),
            ("disk full in a checkpoint", "the previous one intact; the error names the disk"),
            ("disk full in a log", "no glued lines; the run says what it lost"),
            ("read-only run folder", "fails before the first step"),
            ("permission denied on a video", "rejected with file and reason"),
            ("NaN or infinite loss", "no step; samples named; a clear stop with the last good checkpoint"),
            ("out of memory in forward", "gradients within 1e-6 of the run without; one sample alone: 1e-5"),
            ("out of memory in backward", "the same; buffers and random state restored"),
            ("out of memory in validation", "metrics identical; nothing counted twice"),
            ("out of memory in the optimizer's step", "the checkpoint is restored; never a second step"),
            ("out of memory for ever", "stops at one sample, with sizes and the next setting"),
            ('RuntimeError("no room left in zoom buffer")', "not taken for memory"),
            ("a loader worker killed", "reported; resume-equal"),
            ("JSONL torn, NUL-filled, two lines glued", "good lines kept, bad ones counted and shown"),
            ("a bit of a checkpoint flipped", "detected; the one before it is used, and the run says so"),
            ("a stale lock of a dead process or host", "free at once; of a dead host the error names the file"),
            ("two processes on one run folder", "the second refuses, naming the first"),
            ("the clock jumps back", "durations from a monotonic clock; order by step"),
            ("the configuration changed on resume", "refused with the difference; a fork is offered"),
            ("threads or torch version changed on resume", "a warning; bit-equality no longer claimed in the record"),
            ("names of any characters and bytes", "round-trip through every table, notebook and report"),
            ("equal file stems in different folders", "distinct artifacts"),
            ("two samples with one seed or hash prefix", "distinct, or detected"),
            ("a checkpoint that is a malicious pickle", "never executed"),
            ("a parameter name that is code", "refused"),
            ("../ or a symlink out of the corpus in a manifest", "refused, row named"),
            ("an archive that writes outside its folder", "refused"),
            ("a pickled member in a shard", "refused"),
            ("SQL in a run name, path or label", "text, everywhere; queries cannot leave the runs folder"),
            ("HTML or script in a name", "shown as text in notebooks, figures and reports"),
            ("a bit flipped in a file that is read later", "the command refuses the file by name"),
            ("a figure fails after the work is done", "the stage stays done; the page says what could not be drawn"),
            ("disk full while reports are written", "not exit 0; no older report is offered as this one"),
            ("a shard's task killed, or killed twice by a file", "only that shard is redone; the file is rejected"),
            ("a node lost in training over several nodes", "the others stop; requeued; on from the last checkpoint"),
            ("a bundle with a flipped bit, a pickle, a wrong shape", "refused by name; nothing executed"),
            ("an upload that is huge, hostile, broken, or doubled", "a row with the reason; the others go on"),
            ("a fork with another training parameter", "trains from the start; nothing carried under other values"),
            ("a manifest, folder or table whose rows are frames", "one video, or refused with the column to add"),
            ("code edited between a run and its resume", "finished trainings are kept; the difference is shown"),
            ("an archive or table whose headers claim too much", "a row with the reason; memory bounded"),
        ],
        start=1,
    )
)
