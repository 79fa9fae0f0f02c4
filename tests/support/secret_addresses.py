"""Addresses with a secret in every form that Copywatch must redact."""

SECRET = "c4naryPa55word123"
# One secret in the forms that cameras, CDNs and relays use, and in those that people mistype.
FORMS = [
    "rtsp://admin:{}@10.0.0.5:554/live",
    "rtsp://{}@10.0.0.5/live",
    "rtsp://{}:{}@10.0.0.5/live",
    "rtsp://ad.min%40site:{}@cam/live",
    "rtsp://admin:x{}@y@cam/live",
    "rtsp://admin:x/{}@cam/live",
    "rtsp://admin:x?{}@cam/live",
    "rtsp://admin:x#{}@cam/live",
    "rtsp://admin:{}#x@cam/live",
    "rtsp://admin:{}/x@cam/live",
    "rtsp://admin:{}:x@cam/live",
    "rtsp://:{}@cam/live",
    "RTSP://admin:{}@cam/live",
    "rtsp://cam/live?user=admin&password={}",
    "rtsp://cam/user=admin_password={}_channel=1_stream=0.sdp",
    "rtsp://cam/user=admin&password={}&channel=1",
    "rtsp://cam:554/cam/realmonitor;token={}?channel=1",
    "rtsps://admin:{}@[fe80::1]:322/live",
    "http://cdn/live.m3u8?token={}",
    "http://cdn/live.m3u8?{}",
    "http://cdn/live.m3u8?a=1&{}",
    "http://cdn/live.m3u8?a=1;token={}",
    "http://cdn/live.m3u8?a&token={}&b",
    "http://cdn/live.m3u8?token=x&amp;sig={}",
    "http://cdn/live.m3u8#{}",
    "http://cdn/live.m3u8#token={}",
    "http://cdn/hdnts=exp=1~hmac={}/live.m3u8",
    "http://cdn/live/{}/index.m3u8",
    "http://cdn/{}.m3u8",
    "http://cdn/live.m3u8;jsessionid={}",
    "http://user:{}@cdn:8080/get.php?username=u&password={}&type=m3u",
    "http://cdn:8080/live/user/{}/12.ts",
    "https://user:{}@cdn/live.mpd?x=1",
    "http://cdn:{}/live",
    "http://user:{}@[::1]:8080/x",
    "http://user:{}@\\cdn/x",
    "rtmp://a.rtmp.example.com/live2/{}",
    "rtmp://u:{}@host/app/key",
    "rtmps://host:443/app/instance/{}",
    "rtmp://host/app?auth={}/key",
    "udp://239.0.0.1:1234?localaddr=10.0.0.1&key={}",
    "srt://host:9000?passphrase={}&mode=caller",
    "gopher://u:{}@host/x",
]


def filled(form: str) -> str:
    return form.replace("{}", SECRET)
