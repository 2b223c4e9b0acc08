import torch

from fvc_lib.detectors.own.stems import NUM_CHANNELS, pixel_maps


def test_colours_are_averages_of_cells_and_every_cell_knows_its_place():
    frames = torch.randint(0, 256, (2, 3, 3, 7, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    maps = pixel_maps(frames, 2)
    assert maps.shape == (2, NUM_CHANNELS, 3, 3, 4)
    for row in range(3):
        for column in range(4):
            cell = frames[:, :, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].float().mean((3, 4))
            found = maps[:, :, :, row, column].transpose(1, 2)
            torch.testing.assert_close(found[:, :, :3], (cell - 115) / 60)
            torch.testing.assert_close(found[:, 1:, 3:6], (cell[:, 1:] - cell[:, :-1]) / 30)
            assert not found[:, 0, 3:6].any(), "nothing has changed before the first frame"
            expected = torch.tensor([-2 / 3 + row * 2 / 3, -0.75 + column * 0.5])
            torch.testing.assert_close(found[:, :, 6:], expected.expand(2, 3, 2))


def test_cells_of_one_pixel_are_the_pixels():
    frames = torch.arange(48, dtype=torch.uint8).reshape(1, 1, 3, 4, 4)
    assert pixel_maps(frames, 1)[0, :3, 0].equal((frames[0, 0].float() - 115) / 60)
